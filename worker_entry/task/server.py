"""Runs TensorFlow's server until it is stopped: for workers and parameter servers under ParameterServerStrategy.

The chief's program sends the work; this process does not run the user's program.
"""

import tensorflow as tf


def main() -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol=resolver.rpc_layer or "grpc",
    )
    print(f"{resolver.task_type}:{resolver.task_id} serves", flush=True)
    server.join()


if __name__ == "__main__":
    main()
