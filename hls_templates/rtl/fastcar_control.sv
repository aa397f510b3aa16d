// The registers of an RTL kernel under XRT (UG1393, "Control Requirements for XRT-Managed Kernels", ap_ctrl_hs), behind AXI4-Lite:
// control, global interrupt enable, its enable and its status, then ARGUMENTS addresses of 64 bits, 12 bytes apart.
module fastcar_control #(
    parameter int ARGUMENTS = 4,
    localparam int OFFSET_BITS = 12
) (
    input logic clk,
    input logic reset,
    input logic awvalid,
    output logic awready,
    input logic [OFFSET_BITS-1:0] awaddr,
    input logic wvalid,
    output logic wready,
    input logic [31:0] wdata,
    input logic [3:0] wstrb,
    output logic bvalid,
    input logic bready,
    input logic arvalid,
    output logic arready,
    input logic [OFFSET_BITS-1:0] araddr,
    output logic rvalid,
    input logic rready,
    output logic [31:0] rdata,
    output logic start,
    input logic done,
    output logic [ARGUMENTS*64-1:0] arguments,
    output logic interrupt
);
    // A word's number behind those four: of an argument the low half, the high half, and a word that is reserved.
    function automatic logic [31:0] word_of(logic [OFFSET_BITS-3:0] number, logic [ARGUMENTS*64-1:0] from);
        word_of = 32'd0;
        for (int a = 0; a < ARGUMENTS; a++)
            for (int half = 0; half < 2; half++)
                if (number == (OFFSET_BITS - 2)'(4 + 3 * a + half)) word_of = from[64*a+32*half+:32];
    endfunction
    logic idle, was_done, enabled;
    logic [1:0] enables, status;  // done, ready
    // A write takes address and data together.
    wire writes = awvalid && wvalid && !bvalid;
    wire reads = arvalid && !rvalid;
    wire [OFFSET_BITS-3:0] written = awaddr[OFFSET_BITS-1:2], read = araddr[OFFSET_BITS-1:2];
    assign awready = writes;
    assign wready = writes;
    assign arready = !rvalid;
    assign start = writes && written == 0 && wdata[0] && wstrb[0] && idle;
    assign interrupt = enabled && status != 2'd0;
    always_ff @(posedge clk) begin
        bvalid <= !reset && (writes || (bvalid && !bready));
        rvalid <= !reset && (reads || (rvalid && !rready));
        idle <= reset || done || (idle && !start);
        // Of an engine that has ended, both say so until they are read.
        was_done <= !reset && (done || (was_done && !(reads && read == 0)));
        if (writes && wstrb[0]) begin
            if (written == 1) enabled <= wdata[0];
            if (written == 2) enables <= wdata[1:0];
        end
        // A one toggles a bit of the status.
        status <= (status ^ (writes && wstrb[0] && written == 3 ? wdata[1:0] : 2'd0)) | (done ? enables : 2'd0);
        for (int a = 0; a < ARGUMENTS; a++)
            for (int half = 0; half < 2; half++)
                for (int b = 0; b < 4; b++)
                    if (writes && written == (OFFSET_BITS - 2)'(4 + 3 * a + half) && wstrb[b])
                        arguments[64*a+32*half+8*b+:8] <= wdata[8*b+:8];
        if (reads)
            case (read)
                0: rdata <= {28'd0, was_done, idle, was_done, !idle};
                1: rdata <= 32'(enabled);
                2: rdata <= 32'(enables);
                3: rdata <= 32'(status);
                default: rdata <= word_of(read, arguments);
            endcase
        if (reset) begin
            enabled <= 1'b0;
            enables <= 2'd0;
            status <= 2'd0;
        end
    end
endmodule
