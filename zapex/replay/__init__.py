"""The replay: slots, priorities, sampling and the rate limiter."""
