"""What strangers and engines send to the front door, at random: parsers answer, or refuse with an error of theirs."""
