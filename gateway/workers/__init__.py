"""Processes that do work for the event loop which would hold it up."""
