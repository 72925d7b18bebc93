"""Images: prepared shards, read in any order, decoded and varied as pure functions of a seed."""
