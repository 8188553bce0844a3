"""Everything about a target that a later stage would refuse, found before the first answer."""
