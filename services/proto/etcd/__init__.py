"""Messages of etcd that the coordination uses, generated from protos/etcd."""
