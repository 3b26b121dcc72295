"""One model with its KV pool: the only thing the services know of running a model."""
