"""The page of the console: static files without a build step, and the routes that serve them."""
