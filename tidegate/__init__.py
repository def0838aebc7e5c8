"""The one name users import: ``from tidegate import Policy, connect``. The command line is `tidegate.cli`."""

from bus.policy import Policy, connect

__all__ = ["Policy", "connect"]
