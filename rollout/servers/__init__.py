"""vLLM servers: starting them, one client each, the pool that routes and retries, and the code they load (worker/)."""
