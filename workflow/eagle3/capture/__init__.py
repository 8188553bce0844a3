"""Hidden states out of the target, into shards."""
