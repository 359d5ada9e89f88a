"""Generated protobuf and gRPC code of `protos/slipstream/v1`. Do not edit; run `scripts/protos`."""
