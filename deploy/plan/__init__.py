"""`penstock plan`: a run's scheduling on a virtual clock, with the services' decisions, and the memory of a rank. Reads no weights."""
