"""The one writer: takes events, asks the policy, drives the data plane."""
