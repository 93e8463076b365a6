"""Certificates, tokens, roles and rate limits of the service."""
