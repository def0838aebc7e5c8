"""``tidegate demo``: agent sessions through a whole system, and figures that must hold."""
