"""What is said on the bus: typed messages, one family a file.

Every struct here is frozen and keyword-only. Reading ignores unknown fields, so that a newer writer and an older
reader agree; a field that has its default is not written. Changes within ``tg.v1`` are additive only.
"""
