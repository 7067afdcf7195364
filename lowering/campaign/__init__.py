"""A suite of cases on the device at hand: kernels are verified, timed and tuned, and what was found is kept."""
