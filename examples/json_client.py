"""Asks for JSON of a given form, and shows how likely each token was. Made from `airside.proto` alone.

    python examples/json_client.py proto/airside.proto 127.0.0.1:50051 "Paris is the capital of France. As JSON: "

Needs grpcio and grpcio-tools, which makes the stubs from the file here and now.
"""

import json
import math
import sys
from pathlib import Path

import grpc

proto, address, prompt = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.path.insert(0, str(proto.parent))
pb, services = grpc.protos_and_services(proto.name)

schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}

with grpc.insecure_channel(address) as channel:
    request = pb.GenerateRequest(
        prompt=prompt,
        sampling=pb.Sampling(temperature=0),
        stop=pb.Stop(max_tokens=64),
        structure=pb.Structure(json_schema=json.dumps(schema)),
        output=pb.Output(logprobs=0),
    )
    text = ""
    for event in services.InferenceStub(channel).Generate(request):
        match event.WhichOneof("event"):
            case "delta":
                text += event.delta.text
                for token in event.delta.logprobs:
                    print(f"{math.exp(token.logprob):6.1%}  {token.text.decode(errors='replace')!r}")
            case "finished":
                print(f"[{event.finished.reason}]")
    print(json.loads(text))
