// DECIDE with gate `tas`: row by row the cached key goes on chip, and q meets it word by word (scores_of_rows of
// fastcar_tas_core.hpp). Then every score meets the threshold, and its chain count the limit (decide of fastcar_drs.hpp).
//
// A word is there two clocks after its place. The header's fields come as plain scalars, as the controller checked them.
module fastcar_decide #(
    parameter int KEY_WORDS = 256,
    parameter bit WEIGHTED = 1'b0
) (
    input logic clk,
    input logic reset,
    input logic go,
    input logic [5:0] rows,
    input logic [19:0] group,
    input logic [19:0] head_words,
    input logic [19:0] query_words,
    input logic [19:0] key_words,
    input logic [31:0] factor,
    input logic [31:0] threshold,
    input logic [31:0] max_chain,
    input logic couple,
    input logic [31:0] active,
    input logic [31:0] computes,
    output logic busy,
    output logic done,
    output logic [19:0] query_at,
    input logic [127:0] query,
    output logic [19:0] key_at,
    input logic [127:0] key,
    // Weights of chosen heads.
    output logic [19:0] weight_at,
    input logic [31:0] weight,
    output logic [4:0] chain_at,
    input logic [31:0] chain,
    output logic write_score,
    output logic [4:0] score_at,
    output logic [31:0] score,
    output logic [31:0] index_register
);
    localparam int WORD = 2, WEIGHED = WORD + (WEIGHTED ? 4 : 0), SUM = WEIGHED + 5 + 2, SCORE = SUM + 4 + 4;
    localparam int KEY_DRAIN = WORD + 1, COMPARE = WORD + 2, KEY_BITS = KEY_WORDS > 1 ? $clog2(KEY_WORDS) : 1;
    typedef enum logic [2:0] {IDLE, KEY, QUERY, ROWS, DRAIN} phase_t;
    phase_t phase, drained;
    logic [19:0] i, key_base, query_base, word, member, key_head, head;
    logic [4:0] row;
    logic [5:0] wait_for;
    wire last = i == (phase == KEY ? key_words : phase == QUERY ? query_words : 20'(rows)) - 20'd1;
    wire last_row = row == 5'(rows - 6'd1);
    wire last_word = word == head_words - 20'd1, last_member = last_word && member == group - 20'd1;
    assign busy = phase != IDLE;
    assign done = phase == DRAIN && drained == ROWS && wait_for == 0;
    assign key_at = key_base + i;
    assign query_at = query_base + i;
    assign weight_at = head;
    assign chain_at = i[4:0];
    always_ff @(posedge clk) begin
        i <= phase == KEY || phase == QUERY || phase == ROWS ? i + 20'd1 : 20'd0;
        wait_for <= wait_for - 6'd1;
        if (phase == QUERY) begin
            word <= last_word ? 20'd0 : word + 20'd1;
            member <= last_member ? 20'd0 : member + 20'(last_word);
            key_head <= last_member ? key_head + head_words : key_head;
            head <= head + 20'(last_word);
        end else begin
            {word, member, key_head, head} <= 80'd0;
        end
        case (phase)
            IDLE: if (go) begin
                phase <= KEY;
                row <= 5'd0;
                {key_base, query_base} <= 40'd0;
            end
            DRAIN: if (wait_for == 0) begin
                phase <= drained == ROWS ? IDLE : drained == KEY ? QUERY : last_row ? ROWS : KEY;
                if (drained == QUERY) begin
                    row <= row + 5'd1;
                    key_base <= key_base + key_words;
                    query_base <= query_base + query_words;
                end
            end
            default: if (last) begin
                phase <= DRAIN;
                drained <= phase;
                wait_for <= phase == KEY ? 6'(KEY_DRAIN) : phase == QUERY ? 6'(SCORE) : 6'(COMPARE);
            end
        endcase
        if (reset) phase <= IDLE;
    end

    // The key of the row.
    wire write_key;
    wire [19:0] write_at;
    wire [127:0] kept;
    fastcar_delay #(.BITS(21), .CLOCKS(WORD)) d_key (.clk, .in({phase == KEY, i}), .out({write_key, write_at}));
    fastcar_ram #(.BITS(128), .WORDS(KEY_WORDS)) buffer (
        .clk, .write(write_key), .write_at(KEY_BITS'(write_at)), .data(key), .read_at(KEY_BITS'(key_head + word)), .found(kept)
    );

    // Four products a clock, and their sum.
    logic signed [49:0] low, high;
    logic signed [63:0] sum;
    wire signed [47:0] product[0:3];
    for (genvar n = 0; n < 4; n++) begin : g_lane
        wire [31:0] q, k;
        if (WEIGHTED) begin : g_weighted
            fastcar_float_multiply weigh (.clk, .left(query[32*n+:32]), .right(weight), .product(q));
        end else begin : g_plain
            assign q = query[32*n+:32];
        end
        fastcar_delay #(.BITS(32), .CLOCKS(WEIGHED - WORD)) d_kept (.clk, .in(kept[32*n+:32]), .out(k));
        fastcar_fixed_product multiply (.clk, .left(q), .right(k), .product(product[n]));
    end
    wire first, counts;
    fastcar_delay #(.BITS(2), .CLOCKS(SUM - 1)) d_counts (.clk, .in({phase == QUERY && i == 0, phase == QUERY}), .out({first, counts}));
    always_ff @(posedge clk) begin
        low <= 50'(product[0]) + 50'(product[1]);
        high <= 50'(product[2]) + 50'(product[3]);
        if (counts) sum <= (first ? 64'd0 : sum) + (64'(low) + 64'(high));
    end

    // The score.
    wire [31:0] number;
    fastcar_float_of_int #(.BITS(64)) convert (.clk, .value(sum), .number);
    fastcar_float_multiply scale (.clk, .left(number), .right(factor), .product(score));
    fastcar_delay #(.BITS(6), .CLOCKS(SCORE)) d_score (.clk, .in({phase == QUERY && last, row}), .out({write_score, score_at}));

    // The decisions. A NaN never passes, and a threshold of infinity lets nothing pass.
    logic [31:0] scores[0:31];
    logic [31:0] own, compared, replay;
    logic chained, judged;
    wire [4:0] own_row;
    wire own_counts;
    fastcar_delay #(.BITS(6), .CLOCKS(WORD)) d_row (.clk, .in({phase == ROWS, i[4:0]}), .out({own_counts, own_row}));
    logic [4:0] judged_row;
    function automatic logic [31:0] order(input logic [31:0] value);
        order = value[30:0] == 0 ? 32'h80000000 : value[31] ? ~value : {1'b1, value[30:0]};
    endfunction
    wire never = threshold[30:0] > 31'h7F800000 || threshold == 32'h7F800000;
    always_comb own = scores[own_row];
    always_ff @(posedge clk) begin
        if (write_score) scores[score_at] <= score;
        compared <= own[30:0] > 31'h7F800000 ? 32'd0 : order(own);
        chained <= max_chain == 32'hFFFFFFFF || chain < max_chain;
        judged <= own_counts;
        judged_row <= own_row;
        if (phase == IDLE && go) replay <= 32'd0;
        else if (judged) replay[judged_row] <= compared >= order(threshold) && !never && chained;
    end
    // Rows b and b + rows / 2 are a pair.
    wire [31:0] there = 32'hFFFFFFFF >> (6'd32 - rows), own_replay = replay & ~computes;
    wire [4:0] half = 5'(rows >> 1);
    wire [31:0] both = own_replay & (own_replay >> half) & ((32'd1 << half) - 32'd1);
    assign index_register = ~(couple ? both | (both << half) : own_replay) & active & there;
endmodule
