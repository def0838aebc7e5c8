"""The HTTP front door: whose request it is, how long its prompt is, where it goes, what came back."""
