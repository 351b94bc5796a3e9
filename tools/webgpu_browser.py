#!/usr/bin/env python3
"""Runs attention_forward.wgsl, joined with its common files, in headless Chromium, and compares with float64.

    tools/webgpu_browser.py [CHROMIUM]        default: chromium

The page holds the shader's text, leaves the overrides at their defaults, binds buffers as the C++ host does,
runs one head of causal attention and posts its largest error to this script, which served the page.
"""

import http.server
import json
import pathlib
import queue
import re
import subprocess
import sys
import tempfile
import threading

ROOT = pathlib.Path(__file__).resolve().parent.parent
PARAMS_BYTES = (9 + 13) * 16

PAGE = """<!doctype html><body>running</body><script>
const source = SOURCE;
const rowsN = 37, dim = 64, scale = 1 / Math.sqrt(dim);
async function main() {
  const adapter = await navigator.gpu.requestAdapter();
  if (!adapter) throw new Error('no adapter');
  const device = await adapter.requestDevice();
  const errors = [];
  device.addEventListener('uncapturederror', e => errors.push(e.error.message));
  const module = device.createShaderModule({code: source});
  const pipeline = await device.createComputePipelineAsync({layout: 'auto', compute: {module, entryPoint: 'forward'}});
  const make = (bytes, usage) => device.createBuffer({size: bytes, usage});
  const storage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_DST | GPUBufferUsage.COPY_SRC;
  let seed = 1;
  const random = () => { seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0; return seed / 2 ** 31 - 1; };
  const tensors = [0, 1, 2].map(() => Float32Array.from({length: rowsN * dim}, random));
  const buffers = tensors.map(t => { const b = make(t.byteLength, storage); device.queue.writeBuffer(b, 0, t); return b; });
  const out = make(rowsN * dim * 4, storage), lse = make(160, storage);
  const words = new Uint32Array(PARAMS_BYTES / 4), floats = new Float32Array(words.buffer);
  const NONE = 0xffffffff;
  for (const at of [0, 4, 8, 20]) words[at + 3] = dim * 4;   // query, key, value, out: bytes of a row
  words[24 + 3] = 4;                                          // lse
  const w = 36;                                               // after nine Rows
  words.set([1, 1, 1, 1, rowsN, rowsN, dim, dim, 0, 0, 0, 0, 1, 0, 1 << 29, 0], w);
  floats[w + 16] = scale; floats[w + 17] = 0; words[w + 18] = 32; words[w + 19] = 32;
  words.set([NONE, NONE, NONE, 0, NONE, 0, NONE, 0, 0, 0, NONE, 0, NONE, 0, NONE, 0, NONE, NONE, 0, 0, 0, 0, 1, 0,
             0, 0, 1, 1, 0, 0, 1, 0], w + 20);
  const uniform = make(PARAMS_BYTES, GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST);
  device.queue.writeBuffer(uniform, 0, words);
  const spare = () => make(16, storage);
  const list = [uniform, ...buffers, spare(), spare(), spare(), out, lse];
  const group = device.createBindGroup({layout: pipeline.getBindGroupLayout(0),
    entries: list.map((buffer, binding) => ({binding, resource: {buffer}}))});
  const encoder = device.createCommandEncoder(), pass = encoder.beginComputePass();
  pass.setPipeline(pipeline); pass.setBindGroup(0, group); pass.dispatchWorkgroups(Math.ceil(rowsN / 32), 1, 1); pass.end();
  const read = make(rowsN * dim * 4, GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST);
  encoder.copyBufferToBuffer(out, 0, read, 0, rowsN * dim * 4);
  device.queue.submit([encoder.finish()]);
  await read.mapAsync(GPUMapMode.READ);
  const found = new Float32Array(read.getMappedRange());
  let error = 0;
  for (let i = 0; i < rowsN; i++) {                           // causal: keys 0 .. i, in double
    const x = [];
    for (let j = 0; j <= i; j++) { let s = 0; for (let d = 0; d < dim; d++) s += tensors[0][i * dim + d] * tensors[1][j * dim + d]; x.push(s * scale); }
    const m = Math.max(...x), e = x.map(v => Math.exp(v - m)), l = e.reduce((a, b) => a + b);
    for (let d = 0; d < dim; d++) {
      let o = 0; for (let j = 0; j <= i; j++) o += e[j] / l * tensors[2][j * dim + d];
      error = Math.max(error, Math.abs(o - found[i * dim + d]) || (Number.isFinite(found[i * dim + d]) ? 0 : Infinity));
    }
  }
  return JSON.stringify({adapter: adapter.info.vendor + ' ' + adapter.info.description, browser: navigator.userAgent, error, errors});
}
main().catch(e => JSON.stringify({errors: [String(e)]})).then(text => fetch('/result', {method: 'POST', body: text}));

</script>"""


def shader(name: str) -> str:
    """A shader with its lines "// common: x y" replaced by common/x.wgsl and common/y.wgsl, as the build does it."""
    folder = ROOT / "src/webgpu/shaders"
    return re.sub(r"// common: (.*)\n",
                  lambda line: "".join((folder / "common" / f"{part}.wgsl").read_text() for part in line[1].split()),
                  (folder / name).read_text())


def main() -> int:
    browser = sys.argv[1:] or ["chromium"]
    source = shader("attention_forward.wgsl")
    page = PAGE.replace("SOURCE", json.dumps(source)).replace("PARAMS_BYTES", str(PARAMS_BYTES)).encode()
    results: queue.Queue = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page)

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            results.put(json.loads(body))

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as profile:
        command = browser + ["--headless", "--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader",
                             f"--user-data-dir={profile}", "--remote-debugging-port=0",
                             f"http://127.0.0.1:{server.server_port}/"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            result = results.get(timeout=120)
        except queue.Empty:
            print("the page gave no result in two minutes")
            return 1
        finally:
            process.terminate()
            process.wait()
    print(json.dumps(result))
    return 0 if not result["errors"] and 0 < result["error"] < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
