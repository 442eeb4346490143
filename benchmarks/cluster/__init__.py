"""A whole run on hosts of its own, network namespaces, while the network and the processes fail: `make cluster-test`."""
