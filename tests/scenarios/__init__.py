"""Whole builds in every situation: `make test-scenarios`. Long, so `make test` leaves them out."""
