"""`model.fit` under ParameterServerStrategy: the data of the workers, and their steps."""
