"""Other libraries on the same cases, each in its own process: `python -m benchmarks.peers.NAME [PREFIX ...]`."""
