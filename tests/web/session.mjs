// What fastcar.mjs makes of an artifact, as JSON: node session.mjs MODULE ARTIFACT <REQUEST. Logits are bytes in hexadecimal.
import { readFileSync } from "node:fs";

const [module, path] = process.argv.slice(2);
const { load, folder, noise, Sampler } = await import(module);
const { prompt, tokens, thresholds, draws, noises } = JSON.parse(readFileSync(0, "utf8"));
const hex = (array) => Buffer.from(array.buffer, array.byteOffset, array.byteLength).toString("hex");
try {
  const artifact = await load(folder(path));
  const games = await Promise.all(thresholds.map(async (threshold) => {
    const session = artifact.session();
    if (threshold !== "compiled") session.setThreshold(threshold);
    return { session, logits: [hex(await session.prefill(prompt))], decisions: [] };
  }));
  // The sessions take turns: they share the weights and the library's buffers, and nothing else.
  for (const token of tokens) {
    for (const game of games) {
      game.logits.push(hex(await game.session.step(token)));
      game.decisions.push(Array.from(game.session.decisions));
    }
  }
  const drawn = draws.map(({ options, logits }) => {
    const sampler = new Sampler(options);
    return logits.map((row, position) => sampler.choose(Float32Array.from(row), position));
  });
  const found = games.map(({ session, logits, decisions }) => ({ logits, decisions, ratio: session.replayRatio }));
  console.log(JSON.stringify({ games: found, drawn, noises: noises.map((one) => hex(Float64Array.from(noise(...one)))) }));
} catch (error) {
  console.log(JSON.stringify({ error: `${error.constructor.name}: ${error.message}` }));
}
