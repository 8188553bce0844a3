"""The shard format: writer and reader."""
