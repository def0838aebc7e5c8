"""What a soak reads from pages of metrics."""

from __future__ import annotations

from load.soak.watch import total

PAGE = """# HELP tidegate_queue_depth Entries that wait, by queue.
tidegate_queue_depth{queue="admission_hold"} 2.0
tidegate_queue_depth{queue="policy_questions"} 5.0
tidegate_open_grants{worker="a",rank="0"} 1.0
tidegate_open_grants{worker="b",rank="0"} 3.0
tidegate_leader 1.0
"""


def test_samples_are_added_up_by_name_and_label() -> None:
    """All of a name, or those of one label; nothing where there is none, as of a part that does not answer."""
    assert total(PAGE, "tidegate_open_grants") == 4
    assert total(PAGE, "tidegate_queue_depth", 'queue="admission_hold"') == 2
    assert total(PAGE, "tidegate_leader") == 1
    assert total(PAGE, "tidegate_lead") == 0
    assert total("", "tidegate_leader") == 0
