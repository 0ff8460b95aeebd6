"""The client: routes rows by slice to the containers that serve them, and retries what may be retried."""
