// One DSP48E2: sum = packed * shared + the cascade of the slice before. `packed_pair` is taken three clocks before the sum is
// there, `shared` four: its second register is in the slice. The cascade goes over the slices' own wires (UG579).
module fastcar_mac_slice #(
    parameter bit FIRST = 1'b0  // of its cascade: nothing is added
) (
    input logic clk,
    input logic [26:0] packed_pair,
    input logic [17:0] shared,
    input logic [47:0] cascade,
    output logic [47:0] to_next,
    output logic [47:0] sum
);
    DSP48E2 #(
        .AREG(1), .ACASCREG(1), .BREG(2), .BCASCREG(2), .MREG(1), .PREG(1), .ADREG(0), .DREG(0), .CREG(0),
        .ALUMODEREG(0), .CARRYINREG(0), .CARRYINSELREG(0), .INMODEREG(0), .OPMODEREG(0)
    ) slice (
        .CLK(clk),
        .A({3'b000, packed_pair}), .B(shared), .C(48'd0), .D(27'd0), .PCIN(cascade), .ACIN(30'd0), .BCIN(18'd0),
        .OPMODE(FIRST ? 9'b00_000_01_01 : 9'b00_001_01_01), .ALUMODE(4'd0), .INMODE(5'd0), .CARRYINSEL(3'd0),
        .CARRYIN(1'b0), .CARRYCASCIN(1'b0), .MULTSIGNIN(1'b0),
        .CEA1(1'b0), .CEA2(1'b1), .CEB1(1'b1), .CEB2(1'b1), .CEM(1'b1), .CEP(1'b1), .CEAD(1'b0), .CEALUMODE(1'b0),
        .CEC(1'b0), .CECARRYIN(1'b0), .CECTRL(1'b0), .CED(1'b0), .CEINMODE(1'b0),
        .RSTA(1'b0), .RSTALLCARRYIN(1'b0), .RSTALUMODE(1'b0), .RSTB(1'b0), .RSTC(1'b0), .RSTCTRL(1'b0), .RSTD(1'b0),
        .RSTINMODE(1'b0), .RSTM(1'b0), .RSTP(1'b0),
        .P(sum), .PCOUT(to_next)
    );
endmodule
