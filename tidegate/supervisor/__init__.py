"""Child processes kept alive: `policy` decides about restarts, `layout` says which children a system has, the rest
starts, watches and stops them."""
