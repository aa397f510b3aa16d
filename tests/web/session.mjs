// What fastcar.mjs makes of an artifact, as JSON: node session.mjs MODULE ARTIFACT <REQUEST. Logits are bytes in hexadecimal.
import { readFileSync } from "node:fs";

const [module, path] = process.argv.slice(2);
const { load, folder, noise, Sampler } = await import(module);
const { prompt, tokens, thresholds, draws, noises, windows, count } = JSON.parse(readFileSync(0, "utf8"));
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
  // Known tokens, then draws; with fewer rows a step than the decoder has, and with one.
  const decoded = await Promise.all(windows.map(async (window) => {
    const session = artifact.session();
    await session.prefill(prompt);
    session.window = window;
    const reads = [];
    const each = (_, logits) => reads.push([hex(logits), Array.from(session.decisions), hex(session.scores)]);
    const sampler = new Sampler({ seed: 7, temperature: 0.7 });
    // Among all tokens but two: with several rows the library draws, with one this module.
    const choose = sampler.among(2, artifact.config.vocab_size - 2);
    if (window === 1) choose.rule = null;
    const found = await session.decode(tokens.slice(0, 3), count, choose, tokens.slice(3), each);
    const again = await session.decode([found.at(-1)], 9, choose, [], each); // beyond the guesses
    const { position, steps, forwards, replayRatio: ratio } = session;
    return { tokens: [...found, ...again], reads, steps, counts: [position, forwards, ratio] };
  }));
  const found = games.map(({ session, logits, decisions }) => ({ logits, decisions, ratio: session.replayRatio }));
  console.log(JSON.stringify({ games: found, drawn, decoded, noises: noises.map((one) => hex(Float64Array.from(noise(...one)))) }));
} catch (error) {
  console.log(JSON.stringify({ error: `${error.constructor.name}: ${error.message}` }));
}
