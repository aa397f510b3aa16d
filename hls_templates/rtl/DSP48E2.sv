// The DSP slice of UltraScale+ as far as fastcar_mac_slice uses it (UG579), for simulation: A times B in 27 by 18 bits, plus the
// cascade or nothing. Any other use of it ends the simulation. Our own text; AMD's model is not part of this project.
`ifndef SYNTHESIS
/* verilator lint_off UNUSEDSIGNAL */
/* verilator lint_off UNUSEDPARAM */
module DSP48E2 #(
    parameter int ACASCREG = 1, ADREG = 1, ALUMODEREG = 1, AREG = 1, BCASCREG = 1, BREG = 1, CARRYINREG = 1,
    parameter int CARRYINSELREG = 1, CREG = 1, DREG = 1, INMODEREG = 1, MREG = 1, OPMODEREG = 1, PREG = 1,
    parameter AMULTSEL = "A", A_INPUT = "DIRECT", BMULTSEL = "B", B_INPUT = "DIRECT", USE_MULT = "MULTIPLY", USE_SIMD = "ONE48"
) (
    input logic CLK,
    input logic [29:0] A, ACIN,
    input logic [17:0] B, BCIN,
    input logic [47:0] C, PCIN,
    input logic [26:0] D,
    input logic [3:0] ALUMODE,
    input logic [4:0] INMODE,
    input logic [8:0] OPMODE,
    input logic [2:0] CARRYINSEL,
    input logic CARRYIN, CARRYCASCIN, MULTSIGNIN,
    input logic CEA1, CEA2, CEAD, CEALUMODE, CEB1, CEB2, CEC, CECARRYIN, CECTRL, CED, CEINMODE, CEM, CEP,
    input logic RSTA, RSTALLCARRYIN, RSTALUMODE, RSTB, RSTC, RSTCTRL, RSTD, RSTINMODE, RSTM, RSTP,
    output logic [47:0] P, PCOUT
);
    localparam logic [8:0] PRODUCT = 9'b00_000_01_01, ON_CASCADE = 9'b00_001_01_01;
    logic signed [26:0] a2;
    logic signed [17:0] b1, b2;
    logic signed [44:0] m;
    always_ff @(posedge CLK) begin
        a2 <= A[26:0];
        b1 <= B;
        b2 <= b1;
        m <= a2 * b2;
        P <= 48'(m) + (OPMODE == ON_CASCADE ? PCIN : 48'd0);
    end
    assign PCOUT = P;
    always_ff @(posedge CLK) begin
        if (AREG != 1 || BREG != 2 || MREG != 1 || PREG != 1 || ALUMODEREG + CARRYINREG + OPMODEREG + INMODEREG != 0 ||
            AMULTSEL != "A" || BMULTSEL != "B" || A_INPUT != "DIRECT" || B_INPUT != "DIRECT" || USE_MULT != "MULTIPLY" ||
            USE_SIMD != "ONE48" || ALUMODE != 0 || INMODE != 0 || CARRYINSEL != 0 || CARRYIN ||
            (OPMODE != PRODUCT && OPMODE != ON_CASCADE) || !(CEA2 && CEB1 && CEB2 && CEM && CEP) ||
            RSTA || RSTB || RSTM || RSTP) begin
            $fatal(1, "DSP48E2: a use that this model does not have");
        end
    end
endmodule
`endif
