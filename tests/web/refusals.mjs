// What fastcar.mjs and game.mjs refuse, as JSON: node refusals.mjs PAGE ARTIFACT <REQUEST. Each call has its error's text.
import { readFileSync } from "node:fs";

const [page, path] = process.argv.slice(2);
const { load, folder, Sampler } = await import(`${page}/fastcar.mjs`);
const { actionsOf, verify } = await import(`${page}/game.mjs`);
const { world, game, games } = JSON.parse(readFileSync(0, "utf8"));

async function said(call) {
  try {
    await call();
    return "taken";
  } catch (error) {
    return `${error.constructor.name}: ${error.message}`;
  }
}

const read = folder(path);
const changed = (change) => async (name) => {
  if (name !== "manifest.json") return read(name);
  return new TextEncoder().encode(change(new TextDecoder().decode(await read(name))));
};
const manifests = {};
for (const [name, change] of Object.entries({
  "version 99": (text) => text.replace(/"schema_version": ?\d+/, '"schema_version":99'),
  "version as a text": (text) => text.replace(/"schema_version": ?(\d+)/, '"schema_version":"$1"'),
  "no version": () => "{}",
  "null": () => "null",
  "no JSON": () => "{",
}))
  manifests[name] = await said(() => load(changed(change)));
for (const field of ["files", "host", "decoder", "layers"]) {
  const without = (text) => JSON.stringify({ ...JSON.parse(text), [field]: undefined });
  manifests[`no ${field}`] = await said(() => load(changed(without)));
}
manifests["a text is thrown"] = await said(() => load(() => { throw "nothing"; }));
manifests["no file"] = await said(() => load(folder(`${path}/none`)));

const all = {};
const artifact = await load(async (name) => (all[name] = await read(name)));
await load((name) => all[name]); // a source may give bytes at once
const vocabulary = artifact.config.vocab_size;
const session = artifact.session();
const state = () => JSON.stringify([session.position, session.forwards, session.thresholds, session.replays]);
await session.prefill(new Int32Array([1, 2]));
await session.step(3);
const before = state();
const tokens = {};
for (const token of [-1, vocabulary, 1.5, NaN, "1", null, undefined, 1n]) tokens[`step ${token}`] = await said(() => session.step(token));
for (const threshold of [NaN, "0.5", undefined, [0.5], [0.5, NaN], [0.5, "1"], [0.5, undefined], new Float32Array([1, NaN])])
  tokens[`threshold ${threshold}`] = await said(() => session.setThreshold(threshold));
tokens["second prompt"] = await said(() => session.prefill([1]));
const unchanged = state() === before;
const fresh = artifact.session();
for (const prompt of [[], undefined, [-1], [vocabulary], [1, 1.5], Array(artifact.config.max_seq_len + 1).fill(1)])
  tokens[`prompt ${prompt?.slice(0, 2)}, ${prompt?.length}`] = await said(() => fresh.prefill(prompt));
tokens["endless prompt"] = await said(() => fresh.prefill({ length: 1e9 }));
await fresh.prefill(Array(artifact.config.max_seq_len).fill(1));
tokens["step behind the end"] = await said(() => fresh.step(1));
fresh.close();
fresh.close();
for (const call of [() => fresh.step(1), () => fresh.prefill([1]), () => fresh.setThreshold(1)]) tokens[`closed ${call}`] = await said(call);
const own = [artifact.session(), artifact.session()].map(({ states }) => states.places);
for (const options of [{ temperature: NaN }, { temperature: "1" }, { temperature: -1 }, { topK: 1.5 }, { seed: -1 }, { seed: 0.5 }])
  tokens[`sampler ${JSON.stringify(options)}`] = await said(() => new Sampler(options));

const runs = {};
for (const actions of games) runs[actions] = await said(() => actionsOf({ actions, checks: "AAA" }));
const wrong = {};
for (const change of [{ actions: "1*1e9" }, { actions: "999", checks: "A" }, { start: 99 }, { thresholds: [1] }, { seed: -1 }])
  wrong[JSON.stringify(change)] = await said(() => verify(artifact, world, { ...game, ...change }));
console.log(JSON.stringify({ manifests, tokens, unchanged, apart: own[0] !== own[1], runs, wrong }));
