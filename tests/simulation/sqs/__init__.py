"""A model of SQS and of worker processes in virtual time, for random stories about them."""
