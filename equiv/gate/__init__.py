"""The gate: what a policy asks for, the evidence that is there, and one verdict over both."""
