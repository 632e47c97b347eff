// A producer or a worker of Graphile Worker; the twin of benchmarks/peers/child.py, and told the same (processes.py).
// process.hrtime is the monotonic clock, which Python's time.monotonic_ns reads too.

import { createInterface } from "node:readline";
import { makeWorkerUtils, run, runMigrations } from "graphile-worker";

const WARM_ROUNDS = 8;
const WARM_FIRST = 5_000_000;

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const say = (text) => process.stdout.write(`@peers ${text}\n`);
const hear = async () => (await lines.next()).value;
const now = () => Number(process.hrtime.bigint());
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

async function work(order) {
  const numbers = [];
  const times = [];
  const taskList = {
    count: ({ number }) => {
      numbers.push(number);
      times.push(now());
      if (numbers.length === order.expected) say("all");
    },
  };
  const preset = { worker: { connectionString: order.dsn, ...order.settings } };
  say("ready");
  await hear();
  const runner = await run({ preset, taskList, noHandleSignals: true });
  say("started");
  await hear();
  await runner.stop();
  return { numbers, times: order.times ? times : times.slice(0, 1) };
}

async function produce(order) {
  const { batch, ...worker } = order.settings;
  const utils = await makeWorkerUtils({ preset: { worker: { connectionString: order.dsn, ...worker } } });
  const send = (number) => utils.addJob("count", { number });
  let warm = 0;
  for (let round = 0; order.warm && round < WARM_ROUNDS; round++) {
    const sent = [];
    for (let task = 0; task < order.tasks; task++) sent.push(send(order.first + WARM_FIRST + warm++));
    await Promise.all(sent);
  }
  say("ready");
  await hear();
  const result = await { single, paced, bulk }[order.mode](order, send, utils, batch);
  await utils.release();
  return { ...result, warm: [order.first + WARM_FIRST, warm] };
}

async function single(order, send) {
  let sent = 0;
  const started = now();
  const until = started + order.seconds * 1e9;
  const caller = async () => {
    while (now() < until) await send(order.first + sent++);
  };
  await Promise.all(Array.from({ length: order.tasks }, caller));
  return { started, ended: now(), sent: [order.first, sent] };
}

async function paced(order, send) {
  const times = [];
  const started = now();
  for (let number = 0; number < order.count; number++) {
    const at = now();
    times.push(at);
    await send(order.first + number);
    await pause(Math.max(0, order.every * 1000 - (now() - at) / 1e6));
  }
  return { started, ended: now(), sent: [order.first, order.count], times };
}

async function bulk(order, send, utils, batch) {
  const started = now();
  for (let begin = 0; begin < order.count; begin += batch) {
    const jobs = [];
    for (let number = begin; number < Math.min(begin + batch, order.count); number++) {
      jobs.push({ identifier: "count", payload: { number: order.first + number } });
    }
    await utils.addJobs(jobs);
  }
  return { started, ended: now(), sent: [order.first, order.count] };
}

const order = JSON.parse(await hear());
if (order.role === "install") {
  await runMigrations({ connectionString: order.dsn });
  process.exit(0);
}
const result = await (order.role === "worker" ? work : produce)(order);
process.stdout.write(`@peers result ${JSON.stringify(result)}\n`, () => process.exit(0));
