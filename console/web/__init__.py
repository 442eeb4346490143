"""The Runs API and the live page: `penstock console`.

`app.create_app` builds the FastAPI app; `access.py` decides who may do what; `reading_routes.py` has the routes
that read, `control_routes.py` those that start, pause, resume, stop and remove runs; `pages/` holds the files of the page.
It holds no state that run folders, NATS and S3 do not have, and may be killed at any time.
"""
