COVERS = ("launcher/kubernetes", "worker_entry/pod")
