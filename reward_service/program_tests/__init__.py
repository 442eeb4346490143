"""Run programs against the tests of their row, in the sandbox of `penstock.sandbox`; see README.md in this folder."""
