"""How layers read a base variable together with its part."""
