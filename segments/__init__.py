"""Rolled, compressed files of lines that a crash leaves readable: format, rules, writer. Imports nothing of ours."""
