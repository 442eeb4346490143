"""How a run is started where: one file for each launcher, found by `launcher.LAUNCHERS`."""
