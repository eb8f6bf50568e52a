"""Tests of gdn_jax. A package, so that benchmarks can import the oracle and the shapes."""
