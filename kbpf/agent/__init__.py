"""The agent: one thread that takes events, asks the policy and drives the data plane."""
