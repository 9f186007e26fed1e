"""The policy as a model server on the loopback interface, for agents and environments of other projects."""
