"""Stands in for the process of a case: it does what the request says, without importing JAX."""

import json
import os
import sys
import time

request = json.loads(sys.stdin.readline())
for message in request["messages"]:
    print(json.dumps(message), flush=True)
if request["then"] == "sleep":
    time.sleep(60)
print("a last word", file=sys.stderr)
os._exit(4)
