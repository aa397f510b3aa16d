// Process quantize_rows: pass by pass the largest value of every row, the scales of all cores, then int8 words, four values of
// every core per clock. The rows are words of x, or neurons of an MLP: a place of every core's row at once.
module fastcar_quantize_rows #(
    parameter int CORES = 1,
    parameter int PASSES = 1,
    parameter int LANES = 32,
    parameter int ROW_WORDS = 75,
    parameter int CHANNEL_WORDS = 12,
    localparam int WORDS = PASSES * ROW_WORDS,
    localparam int PLACE_BITS = $clog2(WORDS + 1)
) (
    input logic clk,
    input logic reset,
    input logic go,
    input logic [19:0] passes,
    input logic [19:0] inputs,
    input logic [19:0] channel_words,
    output logic busy,
    output logic done,
    input logic [CORES-1:0] write,
    input logic [19:0] write_at,
    input logic [127:0] word,
    input logic [3:0] write_neuron,
    input logic [19:0] neuron_at,
    input logic [CORES*32-1:0] neurons,
    output logic [CORES-1:0] write_row_scale,
    output logic [4:0] row_scale_at,
    output logic [31:0] row_scale,
    output logic [CORES-1:0] write_row,
    output logic [19:0] row_at,
    output logic [CORES*LANES*8-1:0] row_words
);
    localparam int QUADS = LANES / 4;  // words of x in a word of int8
    localparam logic [31:0] SMALLEST = 32'h0DA24260, ONE_OVER_127 = 32'h3C010204;  // 1e-30f, 1.0f / 127.0f
    localparam int SIZES_DRAIN = 4, SCALES_DRAIN = 16, VALUES_DRAIN = 8;
    typedef enum logic [2:0] {IDLE, SIZES, SCALES, VALUES, DRAIN} phase_t;
    phase_t phase, drained;
    logic [19:0] i, k, pass, read_base, quad_word;
    logic [5:0] wait_for;
    wire [19:0] x_words = (inputs + 20'd3) >> 2, padded = channel_words * 20'(QUADS);
    wire last = i == (phase == SIZES ? x_words : phase == SCALES ? 20'(CORES) : padded) - 20'd1;
    wire last_pass = pass == passes - 20'd1;
    assign busy = phase != IDLE;
    assign done = phase == DRAIN && drained == VALUES && wait_for == 0 && last_pass;
    always_ff @(posedge clk) begin
        i <= phase == SIZES || phase == SCALES || phase == VALUES ? i + 20'd1 : 20'd0;
        k <= phase == DRAIN ? 20'd0 : phase == SIZES || phase == VALUES ? k + 20'd4 : k;
        wait_for <= wait_for - 6'd1;
        case (phase)
            IDLE: if (go) begin
                phase <= SIZES;
                pass <= 20'd0;
                read_base <= 20'd0;
                quad_word <= 20'd0;
                k <= 20'd0;
            end
            DRAIN: if (wait_for == 0) begin
                phase <= drained == SIZES ? SCALES : drained == SCALES ? VALUES : last_pass ? IDLE : SIZES;
                if (drained == VALUES) begin
                    pass <= pass + 20'd1;
                    read_base <= read_base + 20'(ROW_WORDS);
                    quad_word <= quad_word + 20'(CHANNEL_WORDS);
                end
            end
            default: if (last) begin
                phase <= DRAIN;
                drained <= phase;
                wait_for <= phase == SIZES ? 6'(SIZES_DRAIN) : phase == SCALES ? 6'(SCALES_DRAIN) : 6'(VALUES_DRAIN);
            end
        endcase
        if (reset) phase <= IDLE;
    end

    // How many of the four values count, and where the words of int8 end.
    wire [2:0] real_values;
    wire sizes, begins, values, ends;
    wire [19:0] int8_at;
    fastcar_delay #(.BITS(3), .CLOCKS(2)) d_real (
        .clk, .in(k >= inputs ? 3'd0 : inputs - k > 20'd3 ? 3'd4 : 3'(inputs - k)), .out(real_values)
    );
    fastcar_delay #(.BITS(2), .CLOCKS(2)) d_sizes (.clk, .in({phase == SIZES, phase == SIZES && i == 0}), .out({sizes, begins}));
    fastcar_delay #(.BITS(22), .CLOCKS(8)) d_values (
        .clk, .in({phase == VALUES, phase == VALUES && i % 20'(QUADS) == 20'(QUADS - 1), quad_word + i / 20'(QUADS)}),
        .out({values, ends, int8_at})
    );
    always_ff @(posedge clk) row_at <= int8_at;

    // The scales, core by core.
    logic [31:0] largest[0:CORES-1];
    logic [31:0] floored;
    logic [31:0] inverse;
    wire [19:0] core_inverse, core_scale;
    wire inverse_known, scale_known;
    wire scales = phase == SCALES;
    always_comb begin
        floored = SMALLEST;
        for (int c = 0; c < CORES; c++) if (i == 20'(c) && largest[c] > SMALLEST) floored = largest[c];
    end
    fastcar_inverse_scale divide (.clk, .size(floored), .inverse);
    fastcar_float_multiply multiply (.clk, .left(floored), .right(ONE_OVER_127), .product(row_scale));
    fastcar_delay #(.BITS(21), .CLOCKS(16)) d_inverse (.clk, .in({scales, i}), .out({inverse_known, core_inverse}));
    fastcar_delay #(.BITS(21), .CLOCKS(4)) d_scale (.clk, .in({scales, i}), .out({scale_known, core_scale}));
    assign row_scale_at = 5'(pass);
    always_comb for (int c = 0; c < CORES; c++) write_row_scale[c] = scale_known && core_scale == 20'(c);

    for (genvar c = 0; c < CORES; c++) begin : g_core
        wire [127:0] x;
        for (genvar n = 0; n < 4; n++) begin : g_lane
            fastcar_ram #(.BITS(32), .WORDS(WORDS + 1)) row (
                .clk, .write(write[c] || write_neuron[n]), .write_at(PLACE_BITS'(write[c] ? write_at : neuron_at)),
                .data(write[c] ? word[32*n+:32] : neurons[32*c+:32]), .read_at(PLACE_BITS'(read_base + i)), .found(x[32*n+:32])
            );
        end
        // The largest size of four values; a NaN is passed over. Sizes order as integers.
        logic [31:0] size[0:3];
        logic [31:0] of_four, own_inverse;
        logic counts, first_of_row;
        always_comb begin
            for (int n = 0; n < 4; n++) begin
                size[n] = {1'b0, x[32*n+:31]};
                if (3'(n) >= real_values || size[n] > 32'h7F800000) size[n] = 32'd0;
            end
        end
        wire [31:0] low = size[0] > size[1] ? size[0] : size[1], high = size[2] > size[3] ? size[2] : size[3];
        always_ff @(posedge clk) begin
            of_four <= low > high ? low : high;
            counts <= sizes;
            first_of_row <= begins;
            if (counts && (first_of_row || of_four > largest[c])) largest[c] <= of_four;
            if (inverse_known && core_inverse == 20'(c)) own_inverse <= inverse;
        end
        logic [LANES*8-1:0] lanes;
        wire [31:0] rounded;
        for (genvar n = 0; n < 4; n++) begin : g_value
            fastcar_quantize quantize (
                .clk, .value(3'(n) < real_values ? x[32*n+:32] : 32'd0), .inverse(own_inverse), .rounded(rounded[8*n+:8])
            );
        end
        always_ff @(posedge clk) begin
            if (values) lanes <= {rounded, lanes[LANES*8-1:32]};
            write_row[c] <= values && ends;
        end
        assign row_words[8*LANES*c+:8*LANES] = lanes;
    end
endmodule
