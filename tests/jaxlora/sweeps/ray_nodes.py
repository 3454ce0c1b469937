"""A Ray cluster of several nodes on this host, which lines of text add and kill.

    python -m tests.jaxlora.sweeps.ray_nodes FOLDER

It prints the address of the head, whose node has no place for a group. Then it follows
`add` (a node with a place for one group), `kill N` (SIGKILL for all processes of the
node that was added as number N) and `head` (SIGKILL for the head's store), and says
`done` after each.
"""

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    common = {"object_store_memory": 100 * 2**20}
    head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": sys.argv[1]}
    cluster, nodes = Cluster(initialize_head=True, head_node_args=common | head), []
    print(cluster.address, flush=True)
    for line in sys.stdin:
        action, _, number = line.strip().partition(" ")
        if action == "add":
            nodes.append(cluster.add_node(num_cpus=1, **common))
        elif action == "kill":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
        else:
            cluster.head_node.kill_gcs_server(check_alive=False)
        print("done", flush=True)


if __name__ == "__main__":
    main()
