"""A client made from `airside.proto` alone, without Airside: what any language would do.

    python examples/generate_client.py proto/airside.proto 127.0.0.1:50051 "The capital of France is"

Needs grpcio and grpcio-tools, which makes the stubs from the file here and now.
"""

import sys
from pathlib import Path

import grpc

proto, address, prompt = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.path.insert(0, str(proto.parent))
pb, services = grpc.protos_and_services(proto.name)

with grpc.insecure_channel(address) as channel:
    request = pb.GenerateRequest(prompt=prompt, sampling=pb.Sampling(temperature=0), stop=pb.Stop(max_tokens=32))
    for event in services.InferenceStub(channel).Generate(request):
        match event.WhichOneof("event"):
            case "delta":
                print(event.delta.text, end="", flush=True)
            case "finished":
                print(f"\n[{event.finished.reason}, {event.finished.usage.completion_tokens} tokens]")
