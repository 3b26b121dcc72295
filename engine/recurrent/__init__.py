"""Recurrent layers: a state after some entries and records of those since, so that rollback is exact."""
