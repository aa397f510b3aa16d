// Process finish_tile: a channel of every core per clock. Four make a word of the result; channels beyond the product's are zero.
// Of an inner product, activated channels or pairs of a gate and its up channel are neurons, each a place of the rows to come.
module fastcar_finish #(
    parameter int PORTS = 4,
    parameter int CORES = 1,
    parameter int PASSES = 1,
    parameter int TILE = 2,
    parameter int PORT_LANES = 1,
    parameter int PORT_BLOCKS = 4,
    parameter int RESULT_WORDS = 2,
    parameter int ROW_WORDS = 75,
    parameter bit GATED = 1'b1
) (
    input logic clk,
    input logic reset,
    input logic go,
    input logic inner,
    input logic [19:0] tiles,
    input logic [19:0] passes,
    input logic [19:0] chunk,
    input logic [19:0] channels,
    input logic blocks_ready,
    output logic begins,
    output logic ends,
    output logic busy,
    // Values, written by the scaler.
    input logic write_values,
    input logic [1:0] write_copy,
    input logic [1:0] read_copy,
    input logic [19:0] value_at,
    input logic [CORES*PORT_LANES*32-1:0] values,
    // Words of the result.
    output logic write_results,
    output logic [19:0] result_at,
    output logic [CORES*128-1:0] results,
    // Neurons of an inner product: which of the four places of a word, and when the last one is written.
    output logic [3:0] write_neuron,
    output logic [19:0] neuron_at,
    output logic [CORES*32-1:0] neurons,
    output logic neurons_done
);
    localparam int VALUE = 2, ACTIVATED = VALUE + 14, NEURON = ACTIVATED + (GATED ? 3 : 0);
    localparam int VALUES = PASSES * TILE * PORT_BLOCKS, VALUE_BITS = $clog2(2 * VALUES);
    logic [19:0] channel, port, lane, place, pass, base, first;
    wire last_of_row = port == 20'(PORTS - 1);
    wire last_of_block = last_of_row || lane == 20'(PORT_LANES - 1);
    wire last_of_pass = channel == chunk - 20'd1;
    wire step;
    fastcar_stage #(.DEPTH(VALUE)) stage (
        .clk, .reset, .go, .tiles, .ready(blocks_ready), .advance(1'b1), .last(last_of_pass && pass == passes - 20'd1),
        .begins, .step, .ends, .busy
    );
    always_ff @(posedge clk) begin
        if (begins) begin
            {channel, port, lane, place, pass, base} <= 120'd0;
        end else if (step) begin
            channel <= last_of_pass ? 20'd0 : channel + 20'd1;
            port <= last_of_row ? 20'd0 : port + 20'd1;
            lane <= last_of_block ? 20'd0 : lane + 20'd1;
            place <= place + 20'(last_of_block);
            pass <= pass + 20'(last_of_pass);
            base <= last_of_pass ? base + 20'(inner ? ROW_WORDS : RESULT_WORDS) : base;
        end
        if (go) first <= 20'd0;
        else if (ends) first <= first + chunk;
    end
    wire real_step = first + channel < channels, real_channel;
    wire [19:0] lane_word, neuron = (first + channel) >> GATED;
    wire ends_neuron = step && inner && real_step && (!GATED || channel[0]);
    fastcar_delay #(.BITS(21), .CLOCKS(VALUE)) d_lane (.clk, .in({real_step, lane}), .out({real_channel, lane_word}));
    fastcar_delay #(.BITS(21), .CLOCKS(VALUE)) d_result (
        .clk, .in({step && !inner && channel[1:0] == 2'd3, base + channel / 20'd4}), .out({write_results, result_at})
    );
    fastcar_delay #(.BITS(24), .CLOCKS(NEURON)) d_neuron (
        .clk, .in({4'(ends_neuron) << neuron[1:0], base + neuron / 20'd4}), .out({write_neuron, neuron_at})
    );
    // The stage ends with the last value: neurons are under way for so long.
    wire late;
    logic was;
    fastcar_delay #(.BITS(1), .CLOCKS(NEURON - VALUE)) d_inner (.clk, .in(inner && busy), .out(late));
    always_ff @(posedge clk) was <= late;
    assign neurons_done = was && !late;
    for (genvar c = 0; c < CORES; c++) begin : g_core
        wire [PORT_LANES*32-1:0] found;
        for (genvar l = 0; l < PORT_LANES; l++) begin : g_lane
            fastcar_ram #(.BITS(32), .WORDS(2 * VALUES)) value (
                .clk, .write(write_values), .write_at(VALUE_BITS'(value_at + (write_copy[0] ? 20'(VALUES) : 20'd0))),
                .data(values[32*(PORT_LANES*c+l)+:32]),
                .read_at(VALUE_BITS'(place + (read_copy[0] ? 20'(VALUES) : 20'd0))), .found(found[32*l+:32])
            );
        end
        logic [31:0] now;
        logic [95:0] earlier;
        always_comb begin
            now = 32'd0;
            for (int l = 0; l < PORT_LANES; l++) if (real_channel && lane_word == 20'(l)) now = found[32*l+:32];
        end
        always_ff @(posedge clk) earlier <= {now, earlier[95:32]};
        assign results[128*c+:128] = {now, earlier};
        wire [31:0] activated;
        fastcar_activation activate (.clk, .value(now), .activated);
        if (GATED) begin : g_gated
            // An up channel comes a clock after its gate.
            wire [31:0] up;
            fastcar_delay #(.BITS(32), .CLOCKS(ACTIVATED - VALUE - 1)) d_up (.clk, .in(now), .out(up));
            fastcar_float_multiply multiply (.clk, .left(activated), .right(up), .product(neurons[32*c+:32]));
        end else begin : g_plain
            assign neurons[32*c+:32] = activated;
        end
    end
endmodule
