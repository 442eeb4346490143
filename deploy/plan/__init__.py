"""`penstock plan`: simulate a run's scheduling on a virtual clock, with the services' own decisions. Pure but for the command."""
