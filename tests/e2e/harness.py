"""Real binaries on 127.0.0.1 and free ports: a server as a context manager, the API from Python.

E2E_BUILD is the build folder. Only the standard library, grpcio and protobuf.
"""
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
import types
import urllib.request

import grpc
from google.protobuf import descriptor_pb2, message_factory

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
BUILD = os.path.realpath(os.environ.get("E2E_BUILD", os.path.join(ROOT, "build")))
SERVER = os.path.join(BUILD, "bin", "qwend")
CLIENT = os.path.join(BUILD, "bin", "qwend-client")
DEMO = os.path.join(ROOT, "models", "demo")
# Sanitizers slow everything down; only limits that guard against hanging use this.
PATIENCE = 120


def _load_messages():
    """Every message of proto/ and of the reflection service, by short name."""
    protos = {os.path.join(ROOT, "proto"): ["qwend/v1/inference.proto", "google/rpc/error_details.proto",
                                            "grpc/health/v1/health.proto"],
              os.path.dirname(os.path.abspath(__file__)): ["reflection.proto"]}
    messages = types.SimpleNamespace()
    with tempfile.TemporaryDirectory() as folder:
        for root, names in protos.items():
            out = os.path.join(folder, "set")
            subprocess.run(["protoc", "-I", root, "--include_imports", f"--descriptor_set_out={out}", *names],
                           check=True)
            with open(out, "rb") as f:
                files = descriptor_pb2.FileDescriptorSet.FromString(f.read())
            for name, message in message_factory.GetMessages(files.file).items():
                setattr(messages, name.rsplit(".", 1)[-1], message)
    return messages


pb = _load_messages()
FINISH = {0: "unspecified", 1: "eos", 2: "stop_string", 3: "stop_token", 4: "length", 5: "aborted"}


def wait_until(condition, what, seconds=PATIENCE):
    """Polls until `condition()` is true and returns its value."""
    until = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.02)


class Server:
    """A running qwend. Leaving the context stops it and fails unless it ended with exit code 0."""

    def __init__(self, *flags, model=DEMO, wait=True, environment=None,
                 channel=grpc.insecure_channel):
        self.folder = tempfile.TemporaryDirectory()
        self.log_path = os.path.join(self.folder.name, "log")
        self.make_channel = channel
        command = [SERVER, "--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0",
                   "--log_format=json", f"--model={model}", *flags]
        env = {k: v for k, v in os.environ.items() if not k.startswith("QWEND_")}
        env.update(environment or {})
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                            env=env, start_new_session=True)
        try:
            if wait:
                self.address = wait_until(lambda: self._address("port"), "the server's port in its log")
                wait_until(lambda: self.health() == "SERVING", "SERVING")
        except BaseException:
            self.kill()
            print(self.log())
            raise

    def _address(self, field):
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log()}")
        match = re.search(rf'"{field}":(\d+)', self.log())
        return match and f"127.0.0.1:{match.group(1)}"

    @property
    def metrics_address(self):
        return wait_until(lambda: self._address("metrics_port"), "the metrics port in the log")

    @property
    def health_address(self):
        return wait_until(lambda: self._address("health_port"), "the health port in the log")

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as f:
            return f.read()

    def channel(self, options=()):
        return self.make_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1),
                                                        ("grpc.enable_http_proxy", 0), *options])

    def api(self, **kw):
        return Api(self.channel(**kw))

    def health(self, service=""):
        try:
            with self.channel() as channel:
                return Api(channel).health(service)
        except grpc.RpcError as error:
            return error.code().name

    def metrics(self):
        """{(name, ((label, value), ...)): number} of /metrics."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=10) as page:
            return parse_metrics(page.read().decode())

    def stop(self, sig=signal.SIGTERM, seconds=PATIENCE):
        self.process.send_signal(sig)
        return self.wait(seconds)

    def wait(self, seconds=PATIENCE):
        return self.process.wait(seconds)

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def close(self):
        self.kill()
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            code = self.stop() if self.process.poll() is None else self.process.returncode
            if kind is None and code != 0:
                raise AssertionError(f"the server ended with {code}:\n{self.log()[-4000:]}")
        finally:
            if kind is not None:
                print("the server's log:\n" + self.log()[-4000:])
            self.close()


class Api:
    """The services over one channel."""

    def __init__(self, channel, metadata=None):
        self.channel = channel
        self.metadata = metadata

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.close()

    def _unary(self, path, request, response, timeout):
        call = self.channel.unary_unary(path, request_serializer=type(request).SerializeToString,
                                        response_deserializer=response.FromString)
        return call(request, timeout=timeout, metadata=self.metadata)

    def generate(self, request, timeout=PATIENCE):
        """The stream of one Generate call."""
        call = self.channel.unary_stream("/qwend.v1.Inference/Generate",
                                         request_serializer=pb.GenerateRequest.SerializeToString,
                                         response_deserializer=pb.GenerateResponse.FromString)
        return call(request, timeout=timeout, metadata=self.metadata)

    def answer(self, request, timeout=PATIENCE):
        return Answer(self.generate(request, timeout))

    def inference(self, method, request, response, timeout=PATIENCE):
        return self._unary(f"/qwend.v1.Inference/{method}", request, response, timeout)

    def control(self, method, request, response, timeout=PATIENCE):
        return self._unary(f"/qwend.v1.Control/{method}", request, response, timeout)

    def unary(self, request, timeout=PATIENCE):
        return self.inference("GenerateUnary", request, pb.GenerateUnaryResponse, timeout)

    def tokenize(self, text, parse_special=False):
        request = pb.TokenizeRequest(text=text, parse_special=parse_special)
        return list(self.inference("Tokenize", request, pb.TokenizeResponse).ids)

    def model(self):
        return self.inference("GetModelInfo", pb.GetModelInfoRequest(), pb.ModelInfo)

    def server(self):
        return self.control("GetServerInfo", pb.GetServerInfoRequest(), pb.ServerInfo)

    def abort(self, request_id):
        return self.control("Abort", pb.AbortRequest(request_id=request_id), pb.AbortResponse)

    def health(self, service=""):
        response = self._unary("/grpc.health.v1.Health/Check", pb.HealthCheckRequest(service=service),
                               pb.HealthCheckResponse, 5)
        return pb.HealthCheckResponse.ServingStatus.Name(response.status)


class Answer:
    """A whole stream, read to its end, with the contract's rules checked on the way."""

    def __init__(self, stream):
        self.messages = list(stream)
        assert self.messages, "a stream that ended OK without a message"
        assert len({m.request_id for m in self.messages}) == 1
        assert [m.HasField("finish") for m in self.messages] == [False] * (len(self.messages) - 1) + [True]
        assert [m.HasField("usage") for m in self.messages] == [False] * (len(self.messages) - 1) + [True]
        self.text = "".join(m.text for m in self.messages)
        self.ids = [i for m in self.messages for i in m.token_ids]
        self.finish = self.messages[-1].finish
        self.usage = self.messages[-1].usage
        self.reason = FINISH[self.finish.reason]


class Background:
    """A stream that a thread reads to its end; constructed once its first message has arrived."""

    def __init__(self, stream):
        self.stream = stream
        self.messages = [next(stream)]
        self.error = None
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self):
        try:
            for message in self.stream:
                self.messages.append(message)
        except grpc.RpcError as error:
            self.error = error

    def join(self):
        self.thread.join()
        return self

    def cancel(self):
        self.stream.cancel()
        return self.join()


def request(prompt, *, system=None, raw=False, greedy=True, **fields):
    """A GenerateRequest: prompt is text (a chat unless raw) or token ids; fields by their short names."""
    r = pb.GenerateRequest(request_id=fields.pop("request_id", ""), priority=fields.pop("priority", 0))
    if isinstance(prompt, (list, tuple)):
        r.token_ids.ids.extend(prompt)
    elif raw:
        r.text = prompt
        r.parse_special = fields.pop("parse_special", False)
    else:
        if system is not None:
            r.chat.messages.add(role="system", content=system)
        r.chat.messages.add(role="user", content=prompt)
    if greedy:
        r.sampling.temperature = 0
    for name, value in fields.items():
        part = next(p for p in (r.sampling, r.stopping, r.output) if name in p.DESCRIPTOR.fields_by_name)
        if isinstance(value, (list, tuple)):
            getattr(part, name).extend(value)
        else:
            setattr(part, name, value)
    return r


def endless(prompt="Tell me a story about a fox.", **fields):
    """A request that runs for a few thousand tokens."""
    fields = {"max_tokens": 3500, "ignore_eos": True, **fields}
    return request(prompt, **fields)


def violations(error):
    """The {field: description} of a google.rpc.BadRequest among an RpcError's details."""
    found = {}
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in pb.Status.FromString(value).details:
                bad = pb.BadRequest()
                if detail.Unpack(bad):
                    found.update({v.field: v.description for v in bad.field_violations})
    return found


def retry_delay(error):
    """The seconds of a google.rpc.RetryInfo among an RpcError's details, or None."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in pb.Status.FromString(value).details:
                retry = pb.RetryInfo()
                if detail.Unpack(retry):
                    return retry.retry_delay.seconds + retry.retry_delay.nanos * 1e-9
    return None


def parse_metrics(text):
    samples = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r'([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?', line)
        assert match, f"not the Prometheus text format: {line!r}"
        labels = tuple(sorted(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match.group(2) or "")))
        samples[(match.group(1), labels)] = float(match.group(3))
    return samples


def value(samples, metric, **labels):
    """The sum of a metric's samples that carry these labels."""
    found = [v for (name, have), v in samples.items()
             if name == metric and set(labels.items()) <= set(have)]
    assert found, f"no {metric} with {labels}"
    return sum(found)


def run_client(*args, stdin="", timeout=PATIENCE):
    """qwend-client to its end: (exit code, standard output, standard error)."""
    done = subprocess.run([CLIENT, *args], input=stdin, capture_output=True, text=True, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


def goldens():
    with open(os.path.join(ROOT, "tests", "golden", "demo-greedy.json"), encoding="utf-8") as f:
        return json.load(f)
